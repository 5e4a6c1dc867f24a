"""Pictures of results: figures, animations, reports."""
