"""The plans of all collectives: which rank sends what to which, and what that costs."""
