"""All messages about launches, and the trees of directories that they name."""
