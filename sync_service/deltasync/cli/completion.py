"""`deltasync completion`."""

import click
from click.shell_completion import get_completion_class

from deltasync.cli.config import CONTEXT


@click.command(context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete commands and options: eval "$(deltasync completion bash)"."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"nothing is known of {shell}")
    script = kind(ctx.find_root().command, {}, "deltasync", "_DELTASYNC_COMPLETE")
    click.echo(script.source())
