"""Functions that read a page of `flash-eval report`, and functions that put hostile markup into results."""

from xml.etree import ElementTree


class Element:
    """An element of a page: its name, attributes and content."""

    def __init__(self, node):
        self.name, self.attributes, self.node = node.tag, node.attrib, node

    def all(self, name="*", class_=None):
        """The elements inside this one that have this name and class, in order."""
        below = (Element(node) for node in self.node.iterfind(f".//{name}"))
        return [each for each in below if class_ in (None, *each.attributes.get("class", "").split())]

    @property
    def text(self):
        return "".join(self.node.itertext())


def parse(page):
    """The root of a page, which must also be XML. Raises if an element is not closed."""
    return Element(ElementTree.parse(page).getroot())


def rows(table):
    """Maps the heading of each row to the texts of the row's cells."""
    body = table.all("tbody")[0].all("tr")
    return {" ".join(name.text for name in row.all("th")): [cell.text for cell in row.all("td")] for row in body}


def head(page):
    """The column heads of the page's first table."""
    return [cell.text for cell in page.all("thead")[0].all("th")]


def answer(page, question):
    """The page's answer to a question: the short answer, such as "Yes", and the sentences that explain it."""
    [card] = [card for card in page.all("section", class_="card") if card.all("h2")[0].text == question]
    return card.all("p", class_="answer")[0].text, " ".join(item.text for item in card.all("li"))


# Fields of results that hostile() leaves as they are, because their values come from fixed lists.
WORDS = {"command", "kind", "of", "order", "arm", "scoring", "documents", "tokens", "mark", "precision"}
HOSTILE = "<script>document.title='x'</script><img src=x onerror=alert(1)>\"'&amp;\u202e" + "x" * 300


def mapped(value, change, key=""):
    """The result with change(value, field name) in place of each value that is neither a list nor an object."""
    if isinstance(value, dict):
        return {name: mapped(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, key) for item in value]
    return change(value, key)


def hostile(*results):
    """Replaces free texts by hostile markup. An implementation's name follows the markup, because names must differ."""

    def change(leaf, key):
        return HOSTILE + leaf * (key == "impl") if isinstance(leaf, str) and key not in WORDS else leaf

    return [mapped(result, change) for result in results]
