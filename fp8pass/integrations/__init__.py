"""Let training frameworks train with fp8pass: a module for each, which imports that framework.

May import: the public names of fp8pass, and report.
Does not live here: anything that the rest of fp8pass needs; nothing of it imports a framework.
"""
