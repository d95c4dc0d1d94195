"""Exactly-once scoring of Kafka events with a causal language model against a frozen prefix."""
