"""The parts of a page of HTML, whose tags must be closed in their order."""

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr", "img", "link", "source"}
# attributes of HTML and SVG that make a browser fetch something
FETCHING = {"src", "href", "xlink:href", "action", "srcset", "data", "poster"}


class Page(HTMLParser):
    """Tags with their attributes, links, and words; no attribute holds a script."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in FETCHING:
                self.links.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
