"""A fitted model in the formats of others: networks as ONNX and TorchScript, embeddings as numpy, Parquet and faiss."""
