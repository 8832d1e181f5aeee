"""Grammars: what an answer may look like, as text for llguidance; who compiles it; how it is built.

content.py    JSON schema, JSON object, regular expression, choice, grammar text
calls.py      the forms in which models write tool calls
compose.py    content or calls, behind a thinking block
compiler.py   text -> matcher, for one vocabulary (gateway: to refuse; worker: to make masks)
"""
