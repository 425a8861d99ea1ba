"""What is learned from: observed pairs and the features of the entities on both sides."""
