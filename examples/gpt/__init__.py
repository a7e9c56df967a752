"""What the examples share: a GPT, data, launcher and check; how ``train_gpt.py`` trains."""
