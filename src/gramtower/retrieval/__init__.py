"""What a trained model is asked: the best right entities for left ones."""
