"""jaxspec chat --url against the server on the built-in model."""

from tests.commands.terminal import CTRL_C, CTRL_D, typed


def test_a_conversation_with_the_live_server(server):
    with typed("chat", "--url", server.url, "--temperature", "0") as terminal:
        terminal.expect("/help lists the commands")
        terminal.line("def area(self):")
        terminal.expect(" ")
        terminal.type(CTRL_C)
        terminal.expect(", stopped\n")
        terminal.line("/clear")
        terminal.line("/tree 3/1/4")
        terminal.line("/colour")
        terminal.line("def area(self):")
        terminal.expect("tokens per forward of the target")
        terminal.line("/plain")
        terminal.line("/clear")
        terminal.line("/tree 5/1/6")
        terminal.line("def area(self):")
        assert "error: " in terminal.expect("this server has")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
