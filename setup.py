"""What pyproject.toml cannot say: the packages, and the description that a package index shows.

``schedulers`` keeps its place at the top of the tree without claiming a bare import name.

The description is the README.  There a relative link leads nowhere.  It becomes a link into the
repository, or, as long as the project has no public address, the name of the file, which the source
distribution holds.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

#: The public address of the repository, without a slash at its end; None: there is none yet.
REPOSITORY = None

SCHEDULERS = "cute_kernels.schedulers"
RELATIVE_LINK = re.compile(r"\[([^\]\n]+)\]\((?![a-z]+:)([^)\s]+)\)")


def description(readme: str, repository: str | None) -> str:
    """The README with no relative link in it."""

    def absolute(link: re.Match) -> str:
        text, target = link.groups()
        if repository:
            return f"[{text}]({repository}/blob/main/{target})"
        file = target.partition("#")[0]
        return text if text == file else f"{text} (`{file}`)"

    return RELATIVE_LINK.sub(absolute, readme)


def packages(root: str) -> list[str]:
    """Every folder with an __init__.py, by its import name."""
    own = find_packages(root, include=["cute_kernels", "cute_kernels.*"])
    below = find_packages(f"{root}/schedulers")
    return [*own, SCHEDULERS, *(f"{SCHEDULERS}.{name}" for name in below)]


def urls(repository: str | None) -> dict[str, str]:
    """The project's links on a package index."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Issues": f"{repository}/issues",
    }


class FreshBuild(build_py):
    """Build without the files of an earlier build, which may be in the tree no more."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if __name__ == "__main__":
    root = Path(__file__).resolve().parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    setup(
        cmdclass={"build_py": FreshBuild},
        packages=packages(str(root)),
        package_dir={SCHEDULERS: "schedulers"},
        long_description=description(readme, REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
    )
