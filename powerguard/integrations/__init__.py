"""Adapters for training frameworks, one small file each."""
