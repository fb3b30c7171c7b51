"""The copies of jobs' stores that one agent keeps."""
