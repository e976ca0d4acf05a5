// How the site's search orders what it finds (conf.py names this file). Sphinx alone gives
// a page the score of its best word, and leaves the order of equals to the alphabet.
var Scorer = {
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  places: [
    [/^docs\/\w+$/, 4], // guides
    [/^docs\/design\/words$/, 10], // defines every word
    [/^docs\/results\/raw\/|^CHANGELOG$|^README$/, -12], // have every word
    [/^docs\/results\/|^notebooks\/|^launch\//, -1],
  ],

  words: [],
  isName: false,

  // A page is better by each of the words that its headings have, and by its place. What
  // is written like a name of the code is looked for in the reference first, a word behind
  // the pages that define it: the reference has every field by its name.
  score: ([page, title, anchor, descr, score]) => {
    const file = Search._index.docnames.indexOf(page);
    const inHeadings = Scorer.words.filter((word) =>
      [Search._index.titleterms[word] ?? []].flat().includes(file),
    );
    const ownTitle = Search._index.titles[file].toLowerCase();
    const inTitle = Scorer.words.filter((word) => ownTitle.includes(word));
    const place = Scorer.places.find(([name]) => name.test(page));
    const ofReference = Scorer.isName ? 15 : -5;
    const extra = page.startsWith("reference/") ? ofReference : 0;
    const ofWords = 4 * (inHeadings.length + inTitle.length);
    return score + ofWords + extra + (place ? place[1] : 0);
  },
};

{
  const parse = Search._parseQuery;
  Search._parseQuery = (typed) => {
    const parsed = parse(typed);
    Scorer.words = [...parsed[1]];
    Scorer.isName = /\w[._]\w/.test(typed);
    return parsed;
  };
}
