"""Reads the page of `flash-eval report` back: its elements, tables, answers and plots."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Element:
    """Of a page: name, attributes, and what is in it."""

    def __init__(self, name, attributes):
        self.name, self.attributes = name, attributes
        self.children = []

    def all(self, name, class_=None):
        """Those of that name, and of that class, below it, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.name == name and class_ in (None, *(child.attributes.get("class") or "").split()):
                    found.append(child)
                found += child.all(name, class_)
        return found

    @property
    def text(self):
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def figures(self):
        """The exact numbers in it; None for a dash."""
        found = []
        for child in self.children:
            if isinstance(child, str):
                found += [None] * child.count("–")
            elif child.name == "data":
                found.append(float(str(child.attributes["value"])))
            else:
                found += child.figures
        return found


class Parser(HTMLParser):
    """Fails where an element is not closed, or not the one that is open."""

    def __init__(self):
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().name == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(page):
    parser = Parser()
    parser.feed(page.read_text("utf-8"))
    parser.close()
    assert len(parser.open) == 1
    return parser.open[0]


def rows(table):
    """The cells of each row by its name."""
    return {row.all("th")[0].text: row.all("td") for row in table.all("tbody")[0].all("tr")}


def answer(page, question):
    """The word, and the sentences."""
    [card] = [card for card in page.all("section", class_="card") if card.all("h2")[0].text == question]
    return card.all("p", class_="answer")[0].text, " ".join(item.text for item in card.all("li"))


def title_of(figure):
    return str(figure.all("figcaption")[0].children[0])


def plots(page):
    """Of each plot the points of each line, as exactly as they are drawn."""
    found = {}
    for figure in page.all("figure"):
        found[title_of(figure)] = {
            str(line.attributes["data-series"]): [
                (int(str(point.attributes["data-length"])), float(str(point.attributes["data-value"])))
                for point in line.all("g", class_="point")
            ]
            for line in figure.all("g", class_="series")
        }
    return found


HOSTILE = "<script>document.title='x'</script><img src=x onerror=alert(1)>\"'&amp;\ud800\u202e" + "x" * 300


def mapped(value, change, key=""):
    """A result with each leaf changed, of which the function also gets the key that it is found by."""
    if isinstance(value, dict):
        return {name: mapped(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, key) for item in value]
    return change(value, key)


def hostile(results):
    """Results that have markup wherever there may be text."""

    def change(leaf, key):
        return HOSTILE if isinstance(leaf, str) and key not in ("command", "kind") else leaf

    return [mapped(result, change) for result in results.values()]
