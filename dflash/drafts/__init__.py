"""Drafts: who proposes. All geometry comes from the checkpoint."""
