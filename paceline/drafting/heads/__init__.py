"""What heads share: checkpoint formats, layers, vocabularies."""
