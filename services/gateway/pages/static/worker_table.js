// A table that is sorted by a column, filtered by text, and shows its first rows until all are asked for.

import { el, setShare, setText, sync } from "./dom.js";

const ROWS = 100;
const NAMES = new Intl.Collator("en", { numeric: true });

export class WorkerTable {
  #columns;
  #key;
  #items = [];
  #filter = "";
  #sorted = 0;
  #descending = false;
  #all = false;
  #body = el("tbody");
  #more = el("button", { type: "button", class: "quiet", hidden: true });
  #empty;
  #table;

  // `columns`: {title, text(item), value(item) for sorting, small(item), share(item), numeric, cell(item)}; all but the
  // first two are optional. `key(item)`: unique.
  constructor(container, columns, key, empty) {
    this.#columns = columns;
    this.#key = key;
    this.#empty = el("p", { class: "empty" }, empty);
    const headers = columns.map((column, index) => this.#header(column, index));
    this.#table = el("table", { class: "workers" }, el("thead", {}, el("tr", {}, ...headers)), this.#body);
    container.append(this.#table, this.#empty, this.#more);
    this.#more.addEventListener("click", () => {
      this.#all = true;
      this.#render();
    });
  }

  show(items, filter = "") {
    this.#items = items;
    this.#filter = filter.trim().toLowerCase();
    this.#render();
  }

  #header(column, index) {
    const button = el("button", { type: "button" }, column.title);
    const attributes = { scope: "col", class: column.numeric && "number", "aria-sort": index ? "none" : "ascending" };
    const header = el("th", attributes, button);
    button.addEventListener("click", () => {
      this.#descending = this.#sorted === index ? !this.#descending : Boolean(column.numeric);
      this.#sorted = index;
      for (const each of header.parentElement.children) each.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", this.#descending ? "descending" : "ascending");
      this.#render();
    });
    return header;
  }

  #render() {
    const found = this.#items.filter((item) => this.#matches(item)).sort((a, b) => this.#compare(a, b));
    const shown = this.#all ? found : found.slice(0, ROWS);
    const newRow = () => el("tr", {}, ...this.#columns.map(newCell));
    sync(this.#body, shown, this.#key, newRow, (row, item) => this.#update(row, item));
    this.#table.hidden = !found.length;
    this.#empty.hidden = Boolean(found.length);
    this.#more.hidden = shown.length === found.length;
    setText(this.#more, `Show all ${found.length}`);
  }

  #matches(item) {
    const words = this.#columns.flatMap((column) => [column.text(item), column.small?.(item) ?? ""]);
    return words.join(" ").toLowerCase().includes(this.#filter);
  }

  #compare(a, b) {
    const column = this.#columns[this.#sorted];
    const value = column.value ?? column.text;
    const order = compared(value(a), value(b));
    return (this.#descending ? -order : order) || compared(this.#key(a), this.#key(b));
  }

  #update(row, item) {
    this.#columns.forEach((column, index) => {
      const cell = row.children[index];
      if (column.cell) {
        column.cell(cell, item);
        return;
      }
      setText(cell.querySelector("span"), column.text(item));
      if (column.small) setText(cell.querySelector("small"), column.small(item));
      if (column.share) setShare(cell.querySelector(".meter"), column.share(item));
    });
  }
}

// Numbers in names by their value: worker-9 before worker-10.
function compared(left, right) {
  if (typeof left === "number") return left - right;
  return NAMES.compare(left, right);
}

function newCell(column, index) {
  const parts = column.cell ? [] : [el("span")];
  if (column.small) parts.push(el("small"));
  if (column.share) parts.push(el("div", { class: "meter", "aria-hidden": "true" }, el("i")));
  const attributes = { class: column.numeric && "number" };
  return index ? el("td", attributes, ...parts) : el("th", { scope: "row" }, ...parts);
}
