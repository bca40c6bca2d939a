// The operator's page: asks the gateway for its report every second or two, and shows it.

import { announce, byId, el, setShare, setText, sync } from "./dom.js";
import { nameOf } from "./completion.js";
import { pageSettings, requestJson, requireKey } from "./connection.js";
import { ReportHistory } from "./report_history.js";
import { Sparkline } from "./sparkline.js";
import { setUpTheme } from "./theme.js";
import { WorkerTable } from "./worker_table.js";

const REFRESH_MS = 1000;
const REFRESH_MANY_MS = 2000;
const MANY_WORKERS = 200;
const SPEED_S = 5;
const LATENCY_S = 60;
const REDIS_AWAY = "Redis is away. Serving goes on; other gateways and acceptance are as last known.";

const idOf = (worker) => worker.key;
const count = (number) => Math.round(number).toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const kvInUse = (target) => (target.slots ? 1 - target.free_slots / target.slots : 0);

const WORKER = { title: "Worker", text: (worker) => worker.id, small: (worker) => worker.address };
const STATE = {
  title: "State",
  text: (worker) => worker.state,
  cell: (cell, worker) => {
    if (!cell.firstElementChild) cell.append(el("span"));
    cell.firstElementChild.className = `state ${worker.state.replace(" ", "-")}`;
    setText(cell.firstElementChild, worker.state);
  },
};
const SERVES = { title: "Serves", text: (worker) => worker.serves };
const TARGET_COLUMNS = [
  WORKER,
  STATE,
  SERVES,
  { title: "Method", text: (target) => nameOf(target.method || "–"), small: (target) => target.labels.join(", ") },
  { title: "Running", text: (target) => count(target.running), value: (target) => target.running, numeric: true },
  { title: "Waiting", text: (target) => count(target.waiting), value: (target) => target.waiting, numeric: true },
  { title: "KV in use", text: (target) => percent(kvInUse(target)), value: kvInUse, share: kvInUse, numeric: true },
  { title: "Step", text: stepText, value: (target) => target.step_s, numeric: true },
];
const DRAFT_COLUMNS = [
  WORKER,
  STATE,
  SERVES,
  { title: "Method", text: (draft) => nameOf(draft.method), small: (draft) => draft.model },
  { title: "Requests", text: (draft) => count(draft.requests), value: (draft) => draft.requests, numeric: true },
];
const KIND_COLUMNS = [
  { title: "Draft", text: (kind) => nameOf(kind.method), small: (kind) => kind.model || "all drafts together" },
  { title: "Requests", text: (kind) => kind.requests },
  {
    title: "Verifications",
    text: (kind) => count(kind.verifications),
    value: (kind) => kind.verifications,
    numeric: true,
  },
  {
    title: "Length",
    text: (kind) => kind.acceptance_length.toFixed(2),
    value: (kind) => kind.acceptance_length,
    numeric: true,
  },
  { title: "By depth", text: () => "", value: (kind) => kind.rates[0] ?? 0, cell: showRates },
];
const GATEWAY_COLUMNS = [
  WORKER,
  { title: "Running", text: (gateway) => count(gateway.running), value: (gateway) => gateway.running, numeric: true },
  { title: "Tokens/s", text: (gateway) => count(gateway.rate), value: (gateway) => gateway.rate, numeric: true },
];

class Operator {
  #history = new ReportHistory(LATENCY_S);
  #sparkline = new Sparkline(byId("sparkline"), 90);
  #targets = new WorkerTable(byId("targets-table"), TARGET_COLUMNS, idOf, "No target.");
  #drafts = new WorkerTable(byId("drafts-table"), DRAFT_COLUMNS, idOf, "No draft worker.");
  #kinds = new WorkerTable(byId("kinds-table"), KIND_COLUMNS, idOf, "Nothing measured yet.");
  #gateways = new WorkerTable(byId("gateways-table"), GATEWAY_COLUMNS, idOf, "No gateway.");
  #report = null;
  #paused = false;
  #absent = null;

  constructor() {
    byId("pause").addEventListener("click", () => this.#pause());
    byId("filter").addEventListener("input", () => this.#report && this.#showWorkers(this.#report));
    this.#loop();
  }

  #pause() {
    this.#paused = !this.#paused;
    byId("pause").setAttribute("aria-pressed", String(this.#paused));
    setText(byId("pause"), this.#paused ? "Resume" : "Pause");
  }

  async #loop() {
    for (;;) {
      if (!this.#paused && !document.hidden) await this.#refresh();
      const workers = this.#report ? this.#report.targets.length + this.#report.drafts.length : 0;
      const wait = workers > MANY_WORKERS ? REFRESH_MANY_MS : REFRESH_MS;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async #refresh() {
    try {
      this.#report = flattened(await requestJson("/operator/state"));
      this.#remember(this.#report);
      this.#showFigures(this.#report);
      this.#showWorkers(this.#report);
      this.#showTrouble(this.#report.redis_unavailable ? REDIS_AWAY : "");
    } catch (error) {
      this.#showTrouble(`No report: ${error.message}`);
    }
  }

  #showTrouble(text) {
    byId("trouble").hidden = !text;
    setText(byId("trouble"), text);
  }

  #remember(report) {
    const counters = Object.fromEntries(report.gateways.map((gateway) => [`tokens of ${gateway.id}`, gateway.tokens]));
    counters.first_tokens = sum(report.models, (model) => model.first_tokens);
    counters.first_token_s = sum(report.models, (model) => model.first_token_s);
    this.#history.add(report.at, counters);
    for (const gateway of report.gateways) gateway.rate = this.#history.rate(`tokens of ${gateway.id}`, SPEED_S);
  }

  #showFigures(report) {
    const speed = sum(report.gateways, (gateway) => gateway.rate);
    this.#sparkline.add(speed);
    const gateways = report.gateways.length;
    figure("tokens-per-s", count(speed), gateways > 1 ? `of ${gateways} gateways` : `over ${SPEED_S} s`);
    const running = sum(report.gateways, (gateway) => gateway.running);
    figure("running", count(running), `here ${count(report.in_flight)} of ${count(report.max_in_flight)}`);
    setShare(byId("running-meter"), report.in_flight / report.max_in_flight);
    const waiting = sum(report.models, (model) => model.waiting);
    figure("waiting", count(waiting), `of ${count(report.max_queue)}`);
    setShare(byId("waiting-meter"), waiting / report.max_queue);
    this.#showFirstToken(report);
    const { length, verifications } = acceptance(report.kinds);
    figure("acceptance", verifications ? length.toFixed(2) : "–", "accepted per verification");
    const reasons = rejections(report.models);
    const words = reasons.map(([reason, number]) => `${reason} ${number}`).join(", ");
    figure("rejected", count(sum(reasons, ([, number]) => number)), words || "none");
    setText(byId("gateway"), report.gateway);
  }

  // The mean of the last minute; if there was no request, of all since the gateway's start.
  #showFirstToken(report) {
    let first = this.#history.rise("first_tokens", LATENCY_S).rise;
    let seconds = this.#history.rise("first_token_s", LATENCY_S).rise;
    const since = first ? "last minute" : "since the start";
    first ||= sum(report.models, (model) => model.first_tokens);
    seconds ||= sum(report.models, (model) => model.first_token_s);
    figure("first-token", first ? duration(seconds / first) : "–", first ? `mean of ${count(first)}, ${since}` : "");
  }

  #showWorkers(report) {
    const filter = byId("filter").value;
    this.#targets.show(report.targets, filter);
    this.#drafts.show(report.drafts, filter);
    this.#kinds.show(report.kinds);
    this.#gateways.show(report.gateways);
    showMap(byId("targets-map"), report.targets, kvInUse);
    const most = Math.max(1, ...report.drafts.map((draft) => draft.requests));
    showMap(byId("drafts-map"), report.drafts, (draft) => draft.requests / most);
    setText(byId("targets-words"), stateWords(report.targets));
    setText(byId("drafts-words"), stateWords(report.drafts));
    this.#announceChanges(report);
  }

  // Say once which workers are not up, when that changes.
  #announceChanges(report) {
    const absent = [...report.targets, ...report.drafts].filter((worker) => worker.state !== "up");
    const words = absent.slice(0, 3).map((worker) => `${worker.id} is ${worker.state}`).join(", ");
    const text = absent.length > 3 ? `${words}, and ${absent.length - 3} more.` : words && `${words}.`;
    if (this.#absent !== null && text !== this.#absent) announce(text || "All workers are up.");
    this.#absent = text;
  }
}

// The report with the workers of all models in one list each. Every entry has a unique `key`, workers what they serve.
function flattened(report) {
  const all = (name) =>
    report.models.flatMap((model) =>
      model[name].map((entry) => {
        return { ...entry, serves: model.model, key: `${model.model} ${entry.id}@${entry.address}` };
      }),
    );
  const kinds = report.models.flatMap((model) =>
    model.acceptance.map((kind) => ({ ...kind, key: `${model.model} ${kind.method} ${kind.model} ${kind.requests}` })),
  );
  const gateways = report.gateways.map((gateway) => ({ ...gateway, key: gateway.id }));
  return { ...report, targets: all("targets"), drafts: all("drafts"), kinds, gateways };
}

function figure(id, value, detail) {
  setText(byId(id), value);
  setText(byId(`${id}-of`), detail);
}

function sum(items, value) {
  return items.reduce((total, item) => total + value(item), 0);
}

// Of what targets measured, which covers every request; else of what gateways measured of draft workers.
function acceptance(kinds) {
  const whole = kinds.filter((kind) => kind.requests === "all");
  const used = whole.length ? whole : kinds;
  const verifications = sum(used, (kind) => kind.verifications);
  const accepted = sum(used, (kind) => kind.verifications * kind.acceptance_length);
  return { verifications, length: verifications ? accepted / verifications : 0 };
}

function rejections(models) {
  const totals = new Map();
  for (const model of models) {
    for (const [reason, number] of Object.entries(model.rejections)) {
      totals.set(reason, (totals.get(reason) ?? 0) + number);
    }
  }
  return [...totals].filter(([, number]) => number);
}

function stepText(target) {
  return target.step_s ? `${(1000 * target.step_s).toFixed(1)} ms` : "–";
}

function duration(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}

// "12 up, 1 failing"
function stateWords(workers) {
  const states = new Map();
  for (const { state } of workers) states.set(state, (states.get(state) ?? 0) + 1);
  return [...states].map(([state, number]) => `${number} ${state}`).join(", ");
}

// One square for each worker, the fuller the busier.
function showMap(container, workers, share) {
  container.hidden = workers.length < 2;
  sync(
    container,
    workers,
    idOf,
    () => el("i"),
    (square, worker) => {
      square.className = worker.state.replace(" ", "-");
      square.title = `${worker.id}: ${worker.state}, ${percent(share(worker))}`;
      setShare(square, share(worker));
    },
  );
}

function showRates(cell, kind) {
  cell.className = "rates";
  cell.setAttribute("aria-label", kind.rates.map((rate, index) => `depth ${index + 1}: ${percent(rate)}`).join(", "));
  sync(
    cell,
    kind.rates.map((rate, index) => ({ rate, depth: index + 1 })),
    (each) => each.depth,
    () => el("i"),
    (bar, each) => {
      bar.title = `depth ${each.depth}: ${percent(each.rate)}`;
      setShare(bar, each.rate);
    },
  );
}

async function main() {
  setUpTheme();
  const settings = await pageSettings();
  if (settings.requires_key) await requireKey();
  new Operator();
}

main();
