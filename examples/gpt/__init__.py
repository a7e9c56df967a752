"""The parts of ``train_gpt.py``: model, data, launcher, check and report."""
