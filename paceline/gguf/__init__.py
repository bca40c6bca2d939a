"""GGUF files, llama.cpp's format for models: header, tensors, configuration. No torch."""
