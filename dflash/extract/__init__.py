"""Stage 1: corpus -> plan -> target -> cache."""
