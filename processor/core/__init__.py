"""The pure core: values in, values out; no clock, no socket, no torch."""
