"""The GPT of the examples, its data, launcher and check; training and report of ``train_gpt.py``."""
