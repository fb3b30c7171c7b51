"""pmesh turns the Macs and Linux boxes at home into one training cluster."""
