"""The store between the stages; see docs/cache-format.md."""
