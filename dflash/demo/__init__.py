"""The whole job on SmolLM2-135M-Instruct."""
