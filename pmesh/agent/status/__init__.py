"""What an agent shows of itself to people and programs, and the lines of its log."""
