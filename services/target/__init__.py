"""The target worker: decodes, verifying what drafts guess."""
