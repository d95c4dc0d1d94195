"""The frozen-prefix engine: the only place that knows torch and transformers."""
