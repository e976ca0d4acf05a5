// Runs the search of a built site in node, as its page does in a browser: the site's own
// scripts and index. Standard input has a JSON list of queries; the answer is a list of
// the results of each, best first, as [page, title, anchor].
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const nothing = () => {};
const page = {
  _: (text) => text,
  _ready: nothing,
  SPHINX_HIGHLIGHT_ENABLED: false,
  document: { getElementById: () => null },
};
page.window = page;
const context = vm.createContext(page);
for (const script of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"])
  vm.runInContext(readFileSync(join(site, script), "utf-8"), context, { filename: script });

const found = JSON.parse(readFileSync(0, "utf-8")).map((query) => {
  page.query = query;
  // The page shows the last one first.
  const results = vm.runInContext(
    "Search._performSearch(...Search._parseQuery(query))",
    context,
  );
  return results.reverse().map(([name, title, anchor]) => [name, title, anchor]);
});
console.log(JSON.stringify(found));
