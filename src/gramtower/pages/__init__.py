"""What pages and figures of runs are made of: an HTML document that loads nothing, tables, and charts by matplotlib."""
