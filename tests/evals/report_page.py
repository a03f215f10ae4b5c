"""Reads the page of `flash-eval report` back: its elements, tables and answers."""

from xml.etree import ElementTree


class Element:
    """Of a page: name, attributes, and what is in it."""

    def __init__(self, node):
        self.name, self.attributes, self.node = node.tag, node.attrib, node

    def all(self, name="*", class_=None):
        """Those of that name, and of that class, below it, in order."""
        below = (Element(node) for node in self.node.iterfind(f".//{name}"))
        return [each for each in below if class_ in (None, *each.attributes.get("class", "").split())]

    @property
    def text(self):
        return "".join(self.node.itertext())


def parse(page):
    """Fails where an element is not closed: the page is XML as well."""
    return Element(ElementTree.parse(page).getroot())


def rows(table):
    """The texts of the cells of each row by its names."""
    body = table.all("tbody")[0].all("tr")
    return {" ".join(name.text for name in row.all("th")): [cell.text for cell in row.all("td")] for row in body}


def head(page):
    """Of its first table."""
    return [cell.text for cell in page.all("thead")[0].all("th")]


def answer(page, question):
    """The word, and the sentences."""
    [card] = [card for card in page.all("section", class_="card") if card.all("h2")[0].text == question]
    return card.all("p", class_="answer")[0].text, " ".join(item.text for item in card.all("li"))


WORDS = {
    "command",
    "kind",
    "of",
    "order",
    "arm",
    "scoring",
    "documents",
    "tokens",
    "mark",
    "precision",
}  # have few values
HOSTILE = "<script>document.title='x'</script><img src=x onerror=alert(1)>\"'&amp;\u202e" + "x" * 300


def mapped(value, change, key=""):
    """A result with each leaf changed, of which the function also gets the key that it is found by."""
    if isinstance(value, dict):
        return {name: mapped(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, key) for item in value]
    return change(value, key)


def hostile(*results):
    """Results that have markup wherever there may be text; implementations still differ."""

    def change(leaf, key):
        return HOSTILE + leaf * (key == "impl") if isinstance(leaf, str) and key not in WORDS else leaf

    return [mapped(result, change) for result in results]
