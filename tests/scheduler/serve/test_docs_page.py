"""The page to read: everything in it, well-formed, and nothing fetched from anywhere."""

import re
from html.parser import HTMLParser

from scheduler.serve.http.docs import page
from scheduler.serve.http.docs.openapi import openapi_document
from scheduler.serve.http.routes import routing_table

DOCUMENT = openapi_document(routing_table())
PAGE = page.render(DOCUMENT)

UNCLOSED = {"meta", "th", "!doctype"}


class _Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.names, self.text = [], [], [], set(), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag not in UNCLOSED:
            self.open.append(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("href", "src", "srcset", "action") if name in given]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_every_tag_is_closed_and_no_anchor_is_there_twice():
    reader = _Reader(PAGE)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))


def test_every_link_leads_somewhere_on_this_server():
    reader = _Reader(PAGE)
    anchors = {f"#{name}" for name in reader.ids}
    assert set(reader.links) - anchors == {"/openapi.json"}


def test_nothing_is_fetched_and_nothing_runs():
    assert _Reader(PAGE).names.isdisjoint({"script", "link", "img", "iframe", "object", "embed"})
    assert re.findall(r"@import|url\(|\bon\w+=", PAGE) == []


def test_it_shows_every_path_field_and_error():
    text = _Reader(PAGE).text
    for path, item in DOCUMENT["paths"].items():
        assert path in text
        for operation in item.values():
            assert operation["summary"].replace("`", "") in text
    for schema in DOCUMENT["components"]["schemas"].values():
        for field, about in schema["properties"].items():
            assert field in text
            assert about.get("description", "").replace("`", "") in text


def test_what_the_document_says_is_text_and_never_markup():
    document = openapi_document(routing_table())
    document["info"]["summary"] = "<script>alert(1)</script> & so on"
    reader = _Reader(page.render(document))
    assert "script" not in reader.names
    assert "<script>alert(1)</script> & so on" in reader.text


async def test_a_browser_is_given_html_that_may_fetch_nothing(server):
    reply = await server.get("/docs")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert reply.body.decode() == PAGE
