// Shows the figures that the controls choose. Without it all of them are shown. The page is XML too, so
// this has no less-than sign and no ampersand.
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
  for (const select of selects) {
    select.addEventListener("change", show);
  }
  controls.hidden = false;
  show();
})();
