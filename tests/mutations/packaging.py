"""What is promised of packaging, broken."""

from mutation import Mutation

MUTATIONS: list[Mutation] = []
