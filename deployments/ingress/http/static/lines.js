// Lists of two texts a line in the live panel, and times in words.

const element = (name, className, parent, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
};

export const age = (seconds) => {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
};

// Pairs of texts as the items of a list; the list and its title are hidden without any.
export const showLines = (id, lines) => {
  const list = document.getElementById(id);
  document.getElementById(id + "-title").hidden = list.hidden = !lines.length;
  const text = JSON.stringify(lines);
  if (list.dataset.lines === text) return;
  list.dataset.lines = text;
  list.replaceChildren();
  for (const [name, note] of lines) {
    const item = element("li", "", list, "");
    element("span", "", item, name);
    element("span", "quiet", item, note);
  }
};
