// Shows the figures that the controls choose, and makes tables of their numbers when they are opened.
// Without it all figures are shown, and the numbers as lines. The page is XML too, so this has no
// less-than sign and no ampersand.
(function () {
  "use strict";
  const controls = document.getElementById("controls");
  const selects = Array.from(controls.querySelectorAll("select"));
  const figures = Array.from(document.querySelectorAll("[data-figure]"));
  function show() {
    let count = 0;
    for (const figure of figures) {
      const fits = selects.every(function (select) {
        const own = figure.getAttribute("data-" + select.name);
        return select.value === "" || own === null || own === select.value;
      });
      figure.hidden = !fits;
      count += fits ? 1 : 0;
    }
    document.getElementById("shown").textContent =
      count + " of " + figures.length + " figures are shown.";
  }
  function tabulate(numbers) {
    const table = document.createElement("table");
    const heads = Number(numbers.getAttribute("data-heads"));
    const lines = numbers.textContent.split("\n");
    table.createCaption().textContent = numbers.getAttribute("data-caption");
    const head = table.createTHead().insertRow();
    const body = table.createTBody();
    let above = [];
    lines.forEach(function (line, number) {
      const row = number === 0 ? head : body.insertRow();
      above = line.split("\t").map(function (text, column) {
        const cell = document.createElement(number === 0 || heads > column ? "th" : "td");
        if (cell.tagName === "TH") cell.scope = number === 0 ? "col" : "row";
        cell.textContent = text || above[column];
        row.append(cell);
        return cell.textContent;
      });
    });
    numbers.replaceWith(table);
  }
  for (const details of document.querySelectorAll("details")) {
    const numbers = details.querySelector("pre");
    details.addEventListener("toggle", function () { tabulate(numbers); }, { once: true });
  }
  for (const select of selects) {
    select.addEventListener("change", show);
  }
  controls.hidden = false;
  show();
})();
