// The latest reports, for rates between them. Counters that fell, as after a gateway's restart, begin anew.

export class ReportHistory {
  #samples = [];
  #keptS;

  constructor(keptS) {
    this.#keptS = keptS;
  }

  // `counters`: by name, totals at the time `at`, in seconds.
  add(at, counters) {
    const last = this.#samples.at(-1);
    if (last && (at < last.at || Object.keys(counters).some((name) => counters[name] < (last.counters[name] ?? 0)))) {
      this.#samples = [];
    }
    this.#samples.push({ at, counters });
    while (this.#samples[0].at < at - this.#keptS) this.#samples.shift();
  }

  // By how much a counter rose within the last `seconds`, and in what time: {rise, seconds}.
  rise(name, seconds) {
    const last = this.#samples.at(-1);
    const first = this.#samples.find((sample) => sample.at >= last.at - seconds && name in sample.counters);
    if (!first) return { rise: 0, seconds: 0 };
    return { rise: last.counters[name] - first.counters[name], seconds: last.at - first.at };
  }

  rate(name, seconds) {
    const { rise, seconds: took } = this.rise(name, seconds);
    return took ? rise / took : 0;
  }
}
