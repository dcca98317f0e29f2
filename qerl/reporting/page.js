// The page's own script: the legend hides and shows lines; the browser filters completions. No library, no network.
// Filters live in the address after '#', so a view can be linked to: report.html#step=20&min=0&max=0.5&text=7+%2B+5
"use strict";

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    for (const mark of document.querySelectorAll("svg [data-arm]"))
      if (mark.dataset.arm === button.dataset.arm) mark.classList.toggle("off", !on);
  });
}

const source = document.getElementById("completions");
if (source) browse(JSON.parse(source.textContent));

function browse({ rows, prompts }) {
  const form = document.querySelector("form.filter"), list = document.getElementById("cards");
  const PAGE = 20;
  let first = 0, found = [];

  for (const field of ["run", "kind", "step"]) {
    const values = [...new Set(rows.map((row) => row[field]))];
    if (field === "step") values.sort((a, b) => a - b);
    for (const value of values) form.elements[field].add(new Option(value, value));
  }
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of wanted) if (form.elements[name]) form.elements[name].value = value;

  const number = (name) => (form.elements[name].value === "" ? null : Number(form.elements[name].value));
  const shown = (value) => (value === null ? "none" : String(Math.round(value * 1000) / 1000));

  function matches(row) {
    for (const field of ["run", "kind", "step"]) {
      const value = form.elements[field].value;
      if (value !== "" && String(row[field]) !== value) return false;
    }
    const [min, max] = [number("min"), number("max")];
    if ((min !== null || max !== null) && row.reward === null) return false;
    if ((min !== null && row.reward < min) || (max !== null && row.reward > max)) return false;
    const problem = form.elements.problem.value.trim();
    if (problem !== "" && row.problem !== problem) return false;
    const text = form.elements.text.value.toLowerCase();
    return text === "" || (prompts[row.prompt] + "\n" + row.completion).toLowerCase().includes(text);
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text; // never markup: a model wrote it
    return made;
  }

  function card(row) {
    const box = element("article", "card"), head = element("header");
    head.append(element("b", row.reward > 0 ? "good" : "bad", `reward ${shown(row.reward)}`));
    const terms = Object.entries(row.terms);
    if (terms.length > 1 || row.reward === null)
      head.append(element("span", "", terms.map(([name, value]) => `${name} ${shown(value)}`).join(", ")));
    if (row.advantage !== null) head.append(element("span", "", `advantage ${shown(row.advantage)}`));
    head.append(element("span", "", `${row.run}, ${row.kind}, step ${row.step}`));
    const problem = element("a", "", `problem ${row.problem}`);
    problem.href = "#problem=" + encodeURIComponent(row.problem);
    problem.addEventListener("click", (event) => {
      event.preventDefault();
      form.elements.problem.value = row.problem;
      update();
    });
    head.append(problem, element("span", "", `sample ${row.sample}`));
    head.append(element("span", "", `${row.tokens} tokens, ${row.finish === "length" ? "cut" : "ended"}`));
    if (row.answer !== null) head.append(element("span", "", `answer: ${row.answer}`));
    box.append(head, element("div", "text-of prompt", prompts[row.prompt]), element("div", "text-of", row.completion));
    return box;
  }

  function draw() {
    list.replaceChildren(...found.slice(first, first + PAGE).map(card));
    const last = Math.min(first + PAGE, found.length);
    document.getElementById("count").textContent =
      found.length ? `${first + 1} to ${last} of ${found.length} (${rows.length} in the page)` : "none match";
    document.getElementById("back").disabled = first === 0;
    document.getElementById("on").disabled = last >= found.length;
  }

  function update() {
    found = rows.filter(matches);
    const order = form.elements.order.value;
    const sign = { low: 1, high: -1 }[order];
    if (sign) found.sort((a, b) => sign * ((a.reward ?? -Infinity) - (b.reward ?? -Infinity)));
    first = 0;
    const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== "" && value !== "time"));
    history.replaceState(null, "", "#" + state);
    draw();
  }

  form.addEventListener("input", update);
  form.addEventListener("reset", () => setTimeout(update));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("back").addEventListener("click", () => { first -= PAGE; draw(); });
  document.getElementById("on").addEventListener("click", () => { first += PAGE; draw(); });
  update();
}
