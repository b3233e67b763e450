"""
What mkdocs needs to know of pages that are read in the repository too. A link that leaves docs/ leads to the file in the
repository where `repo_url` says where that is, and is plain text where it does not; one to a file that does not exist
fails. The changelog is a page of the site.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


log = logging.getLogger("mkdocs.hooks")  # mkdocs counts its warnings, and --strict fails on any
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CHANGELOG = "changelog.md"


def on_files(files, config):
    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text()
    files.append(File.generated(config, CHANGELOG, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    root = Path(config.config_file_path).parent
    docs = Path(config.docs_dir).relative_to(root).as_posix()
    folder = posixpath.dirname("CHANGELOG.md" if page.file.src_uri == CHANGELOG else f"{docs}/{page.file.src_uri}")

    def link(match: re.Match) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path == "CHANGELOG.md":
            return f"[{text}]({posixpath.relpath(CHANGELOG, posixpath.dirname(page.file.src_uri) or '.')})"
        if path.startswith(f"{docs}/"):  # mkdocs checks it
            return match[0] if page.file.src_uri != CHANGELOG else f"[{text}]({target.removeprefix(f'{docs}/')})"
        if not (root / path).exists():
            log.warning(f"{page.file.src_uri} links to {target}, which is not in the repository")
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(link, markdown)
