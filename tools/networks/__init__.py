"""Networks as people have them: crowded Wi-Fi, two homes, another continent, an orbit."""
