"""Tools of MCP servers, as an extension (rules H118 and H380 to H395). Extra ``mcp``.

``server`` is the object that a host opens; ``connection`` one connection to the server, over ``stdio`` or ``http``;
``mirror`` makes tools of what a server lists, ``checking`` checks arguments and results, ``content`` reads answers,
``calls`` says what becomes of a call whose connection was lost. Only ``server`` and ``settings`` may be imported where
the extra is not installed.
"""
