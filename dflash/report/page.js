"use strict";
// A chart says what it shows at the pointer, or at the place that the arrow keys have reached. The numbers are
// those of the table beside it; without this script the table is there all the same.
for (const svg of document.querySelectorAll("svg[data-marks]")) {
  const figure = svg.closest("figure");
  const marks = svg.dataset.marks.split(" ").map(Number);
  const heads = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent);
  const rows = [...figure.querySelectorAll("tbody tr")];
  const cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout");
  let place = -1;
  const show = (next) => {
    place = Math.max(0, Math.min(marks.length - 1, next));
    const cells = [...rows[place].children].map((cell, n) => `${heads[n]} ${cell.textContent}`);
    readout.textContent = cells.join(" · ");
    cursor.setAttribute("x1", marks[place]);
    cursor.setAttribute("x2", marks[place]);
    cursor.classList.add("on");
  };
  const leave = () => {
    readout.textContent = "";
    cursor.classList.remove("on");
  };
  svg.tabIndex = 0;
  svg.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: marks.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const distances = marks.map((mark) => Math.abs(mark - x));
    show(distances.indexOf(Math.min(...distances)));
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
}
