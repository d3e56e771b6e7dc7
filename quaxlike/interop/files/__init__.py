"""Files: containers of tensors, JSON, configurations, and what lies beside them in a folder."""
