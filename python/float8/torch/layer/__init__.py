"""The layer, conversions of models to it, and copies of weights that it keeps."""
