"""The interfaces of other libraries, so that a script needs one changed import."""
