"""`python -m pmesh.cli`: how `pmesh up --detach` starts the agent."""

from pmesh.cli import main

main()
