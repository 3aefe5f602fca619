"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const CATEGORIES = data.categories;
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const size = (count) => {
    if (Math.abs(count) < 10000) return `${count.toLocaleString("en")} B`;
    let unit = -1;
    do { count /= 1000; unit += 1; } while (Math.abs(count) >= 1000 && unit < 3);
    return `${count.toFixed(2)} ${["kB", "MB", "GB", "TB"][unit]}`;
  };
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part < 0.0995 * whole ? 1 : 0)}%` : "");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The head: sentences, and lines to type.
  document.title = data.title;
  byId("title").textContent = data.title;
  byId("made").textContent = data.made;
  for (const sentence of data.sentences) byId("says").append(make("li", sentence));
  for (const advice of data.advice) {
    const item = make("li", `${advice.text} `);
    if (advice.line) item.append(make("code", advice.line));
    byId("next").append(item);
  }
  byId("next-section").hidden = data.advice.length === 0;

  // Each step: the live bytes of every category after every event. Moment 0 is before the first event.
  for (const step of data.steps) {
    const count = step.bytes.length;
    step.live = CATEGORIES.map((name) => new Float64Array(count + 1).fill(step.standing[name] || 0));
    step.total = new Float64Array(count + 1);
    step.seconds = new Float64Array(count + 1);
    for (let k = 0; k < CATEGORIES.length; k += 1) step.total[0] += step.live[k][0];
    step.peak = 0;
    for (let n = 0; n < count; n += 1) {
      for (let k = 0; k < CATEGORIES.length; k += 1) step.live[k][n + 1] = step.live[k][n];
      step.live[step.category[n]][n + 1] += step.bytes[n];
      step.total[n + 1] = step.total[n] + step.bytes[n];
      step.seconds[n + 1] = step.microseconds[n] / 1e6;
      if (step.total[n + 1] > step.total[step.peak]) step.peak = n + 1;
    }
  }

  let shown = data.steps[0];
  let moment = 0;
  let held = false;
  const chart = byId("chart");
  const canvas = byId("canvas");
  const LEFT = 74, RIGHT = 12, TOP = 12, BOTTOM = 24;

  const top = () => 1.06 * Math.max(1, ...data.steps.map((step) => step.total[step.peak]));
  const across = (step, n) => {
    const last = step.seconds[step.seconds.length - 1] || 1;
    return LEFT + (step.seconds[n] / last) * (canvas.clientWidth - LEFT - RIGHT);
  };
  const upward = (bytes) => canvas.clientHeight - BOTTOM - (bytes / top()) * (canvas.clientHeight - TOP - BOTTOM);

  // One moment for each column of pixels: the highest of those that fall into it.
  const columns = (step) => {
    const found = [];
    let column = -1;
    for (let n = 0; n < step.total.length; n += 1) {
      const x = Math.round(across(step, n));
      if (x !== column) { found.push(n); column = x; }
      else if (step.total[n] > step.total[found[found.length - 1]]) found[found.length - 1] = n;
    }
    return found;
  };

  // The corners of a curve that stays level between its moments: where it is, and which moment's value it has there.
  const steps = (step, moments) => moments.flatMap((n, i) => (i ? [[across(step, n), i - 1]] : []).concat([[across(step, n), i]]));

  const draw = () => {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const high = top();
    const rough = high / 5;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    for (let bytes = 0; bytes < high; bytes += gap) {
      const y = upward(bytes);
      pen.strokeStyle = color("--line");
      pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(canvas.clientWidth - RIGHT, y); pen.stroke();
      pen.fillStyle = color("--soft"); pen.textAlign = "right";
      pen.fillText(size(bytes), LEFT - 8, y + 4);
    }
    const moments = columns(shown);
    const base = new Float64Array(moments.length);
    CATEGORIES.forEach((_, k) => {
      pen.fillStyle = color(`--c${k}`);
      pen.beginPath();
      const corners = steps(shown, moments);
      for (const [x, i] of corners) pen.lineTo(x, upward(base[i] + shown.live[k][moments[i]]));
      for (const [x, i] of corners.reverse()) pen.lineTo(x, upward(base[i]));
      pen.fill();
      moments.forEach((n, i) => { base[i] += shown.live[k][n]; });
    });
    for (const step of data.steps.filter((other) => other.is_compared && !shown.is_lean)) {
      pen.strokeStyle = color("--lean"); pen.setLineDash([6, 4]); pen.lineWidth = 2;
      pen.beginPath();
      const moments = columns(step);
      for (const [x, i] of steps(step, moments)) pen.lineTo(x, upward(step.total[moments[i]]));
      pen.stroke(); pen.setLineDash([]); pen.lineWidth = 1;
    }
    pen.fillStyle = color("--soft"); pen.textAlign = "left";
    const phases = [];
    shown.phase.forEach((phase, n) => { if (!n || phase !== shown.phase[n - 1]) phases.push([n, phase]); });
    phases.forEach(([n, phase], i) => {
      const x = across(shown, n + 1);
      const end = i + 1 < phases.length ? across(shown, phases[i + 1][0] + 1) : canvas.clientWidth;
      const name = data.phases[phase] === "other" ? "after backward" : data.phases[phase];
      if (end - x > pen.measureText(name).width + 8) pen.fillText(name, x, canvas.clientHeight - 8);
    });
  };

  const PHASE = { forward: "in forward", backward: "in backward", other: "after backward" };
  const say = () => {
    const n = moment;
    const cursor = byId("cursor");
    cursor.hidden = false;
    cursor.style.left = `${across(shown, n)}px`;
    const at = n === shown.peak ? "at the peak" : `${(1e3 * shown.seconds[n]).toFixed(2)} ms into the step`;
    const phase = n ? `, ${PHASE[data.phases[shown.phase[n - 1]]]}` : "";
    byId("when").textContent = `${at}${phase}: ${size(shown.total[n])}`;
    chart.setAttribute("aria-valuemax", shown.total.length - 1);
    chart.setAttribute("aria-valuenow", n);
    chart.setAttribute("aria-valuetext", byId("when").textContent);
    const legend = byId("legend");
    legend.replaceChildren();
    CATEGORIES.forEach((name, k) => {
      const entry = make("span", undefined, { "data-category": name });
      const spot = make("i");
      spot.style.background = `var(--c${k})`;
      entry.append(spot, `${name} ${size(shown.live[k][n])}`);
      legend.append(entry);
    });
    const lean = data.steps.find((step) => step.is_compared);
    if (lean && !shown.is_lean) {
      const entry = make("span");
      entry.append(make("i", undefined, { class: "dashed" }), `lean (${lean.name}), its peak ${size(lean.total[lean.peak])}`);
      legend.append(entry);
    }
    tree();
  };

  // The tree of what is alive: modules, then ops, then source lines.
  const open = new Set();
  const alive = () => {
    const found = new Map();
    for (let n = 0; n < moment; n += 1) {
      if (shown.bytes[n] > 0) found.set(shown.block[n], n);
      else found.delete(shown.block[n]);
    }
    return found.values();
  };
  const node = (name) => ({ name, bytes: 0, parts: new Float64Array(CATEGORIES.length), children: new Map() });
  const grow = () => {
    const root = node("");
    const add = (path, category, bytes) => {
      let at = root;
      for (const name of path) {
        if (!at.children.has(name)) at.children.set(name, node(name));
        at = at.children.get(name);
        at.bytes += bytes;
        at.parts[category] += bytes;
      }
    };
    const older = [0, 0];  // what stood before the step and is gone by now: gradients, and other
    for (let n = 0; n < moment; n += 1) {
      if (shown.block[n] < 0) older[CATEGORIES[shown.category[n]] === "gradients" ? 0 : 1] += shown.bytes[n];
    }
    CATEGORIES.forEach((name, k) => {
      const bytes = (shown.standing[name] || 0) + (name === "gradients" ? older[0] : name === "other" ? older[1] : 0);
      if (bytes) add([`before the step: ${name}`], k, bytes);
    });
    for (const n of alive()) {
      const module = data.strings[shown.module[n]];
      const path = module ? module.split(".") : ["code outside any module"];
      const line = data.strings[shown.line[n]];
      path.push(data.strings[shown.op[n]] || "no op");
      if (line) path.push(line);
      add(path, shown.category[n], shown.bytes[n]);
    }
    return root;
  };
  const MOST = 200;
  const tree = () => {
    const body = byId("tree").tBodies[0];
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.path : undefined;
    body.replaceChildren();
    const whole = shown.total[moment];
    const show = (parent, depth, prefix) => {
      const children = [...parent.children.values()].sort((a, b) => b.bytes - a.bytes);
      for (const child of children.slice(0, MOST)) {
        const path = `${prefix}\u0000${child.name}`;
        const row = make("tr", undefined, { "data-path": path, tabindex: "0", "aria-level": depth + 1 });
        const isOpen = open.has(path);
        if (child.children.size) row.setAttribute("aria-expanded", isOpen);
        const name = make("td");
        name.style.paddingLeft = `${8 + 18 * depth}px`;
        name.append(make("span", child.children.size ? (isOpen ? "▾" : "▸") : "", { class: "twist" }), child.name);
        const bar = make("div", undefined, { class: "bar" });
        bar.style.width = `${Math.max(1, (100 * child.bytes) / whole)}%`;
        child.parts.forEach((bytes, k) => {
          if (bytes <= 0) return;
          const part = make("i", undefined, { title: `${CATEGORIES[k]} ${size(bytes)}` });
          part.style.width = `${(100 * bytes) / child.bytes}%`;
          part.style.background = `var(--c${k})`;
          bar.append(part);
        });
        const holder = make("td");
        holder.append(bar);
        row.append(name, make("td", size(child.bytes), { class: "number" }), make("td", share(child.bytes, whole), { class: "number" }), holder);
        body.append(row);
        if (isOpen) show(child, depth + 1, path);
      }
      if (children.length > MOST) {
        const rest = children.slice(MOST).reduce((sum, child) => sum + child.bytes, 0);
        const row = make("tr");
        row.append(make("td", `${children.length - MOST} more`), make("td", size(rest), { class: "number" }), make("td", share(rest, whole), { class: "number" }), make("td"));
        body.append(row);
      }
    };
    show(grow(), 0, "");
    if (focused !== undefined) [...body.rows].find((row) => row.dataset.path === focused)?.focus();
  };
  const twist = (row, wanted) => {
    if (!row || !row.hasAttribute("aria-expanded")) return;
    const isOpen = open.has(row.dataset.path);
    if (wanted === isOpen) return;
    if (isOpen) open.delete(row.dataset.path); else open.add(row.dataset.path);
    row.focus();
    tree();
  };
  byId("tree").addEventListener("click", (event) => twist(event.target.closest("tbody tr")));
  byId("tree").addEventListener("keydown", (event) => {
    const row = event.target.closest("tbody tr");
    if (!row) return;
    const act = {
      ArrowDown: () => row.nextElementSibling?.focus(),
      ArrowUp: () => row.previousElementSibling?.focus(),
      ArrowRight: () => twist(row, true),
      ArrowLeft: () => twist(row, false),
      Enter: () => twist(row),
      " ": () => twist(row),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  // The cursor, by pointer and by keys.
  const nearest = (x) => {
    let low = 0, high = shown.total.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (across(shown, middle) < x) low = middle + 1; else high = middle;
    }
    let best = low;  // of the moments in this column of pixels, the highest
    for (let n = low; n < shown.total.length && across(shown, n) < x + 1; n += 1) if (shown.total[n] > shown.total[best]) best = n;
    return best;
  };
  let waiting = false;
  const go = (n) => {
    moment = Math.max(0, Math.min(shown.total.length - 1, n));
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; say(); });
  };
  chart.addEventListener("pointermove", (event) => { if (!held) go(nearest(event.offsetX)); });
  chart.addEventListener("click", (event) => { held = !held; go(nearest(event.offsetX)); });
  chart.addEventListener("pointerleave", () => { if (!held) go(shown.peak); });
  chart.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: moment + far, ArrowLeft: moment - far, Home: 0, End: shown.total.length - 1, p: shown.peak, P: shown.peak }[event.key];
    if (to !== undefined) { event.preventDefault(); held = true; go(to); }
    if (event.key === "Enter") held = !held;
  });

  // Which step is shown.
  const choose = (step) => {
    shown = step;
    held = false;
    moment = step.peak;
    [...byId("steps").children].forEach((button, n) => button.setAttribute("aria-selected", data.steps[n] === step));
    draw();
    say();
  };
  for (const step of data.steps) {
    const button = make("button", `${step.name}: ${size(step.total[step.peak])}`, { role: "tab", type: "button" });
    button.addEventListener("click", () => choose(step));
    byId("steps").append(button);
  }

  // The ledger.
  byId("ledger-section").hidden = data.ledger.length === 0;
  byId("ledger-totals").textContent = data.ledger_totals;
  for (const row of data.ledger.slice(0, 1000)) {
    const line = make("tr");
    for (const text of [row.made_by, row.op, row.read_by, row.outcome]) line.append(make("td", text));
    line.append(make("td", row.count, { class: "number" }), make("td", size(row.nbytes), { class: "number" }), make("td", row.why));
    byId("ledger").tBodies[0].append(line);
  }

  if (shown) {
    choose(data.steps.find((step) => step.is_chosen) || shown);
    new ResizeObserver(() => { draw(); say(); }).observe(chart);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  } else {
    for (const id of ["chart", "tree"]) byId(id).hidden = true;
  }
  document.body.dataset.ready = "yes";
})();
