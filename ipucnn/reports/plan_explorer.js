"use strict";
/* Lets the reader of a plan's page choose a configuration.  The page is XML as well, so that there is no "less than"
   and no "and" sign in here.  Text goes into the page as text: nothing of the data is taken for markup. */

/* What runs in which tick, as ipucnn.planning.cost.schedule.Ticks has it. */
function ticksOf(schedule, stages, count, training) {
  var last = stages - 1;
  var kind = training ? schedule : schedule === "Sequential" ? schedule : "inference";
  var lengths = {
    Sequential: [count, 0],
    inference: [count + last, last],
    Grouped: [count + 2 * last, 2 * last],
    Interleaved: [2 * (count + last), 2 * last + 1]
  };
  var ramp = lengths[kind][1];
  var end = kind === "Interleaved" ? 2 * count - 1 : count;
  function going(tick, distance) {
    var found = [];
    for (var s = 0; stages > s; s += 1) {
      var m = distance(s);
      if (kind === "Interleaved") {
        if (m % 2 !== 0) { continue; }
        m /= 2;
      }
      if (m >= 0 ? count > m : false) { found.push([s, m]); }
    }
    return found;
  }
  return {
    kind: kind,
    period: kind === "Interleaved" ? 2 : 1,
    num: lengths[kind][0],
    fullStart: Math.min(ramp, end),
    fullEnd: end,
    forward: function (tick) { return going(tick, function (s) { return tick - s; }); },
    backward: function (tick) {
      return kind === "inference" ? [] : going(tick, function (s) { return tick - ramp + s; });
    }
  };
}

/* The spans of a weight update; of its full ticks a few are told, and the rest is left out. */
function timelineOf(choice, count, told) {
  var stages = choice.stages;
  var ticks = ticksOf(choice.schedule, stages.length, count, choice.training);
  var spans = [];
  function receives(list) {
    return list.reduce(function (most, s) { return Math.max(most, stages[s].receive); }, 0);
  }
  function exchange(seconds, now) {
    if (seconds > 0) {
      spans.push({ kind: "transfer", stage: -1, microBatch: -1, start: now, end: now + seconds });
    }
    return now + seconds;
  }
  function passes(going, kind, now, free) {
    return going.reduce(function (end, pair) {
      var stage = stages[pair[0]];
      var begin = free[stage.ipu] === undefined ? now : free[stage.ipu];
      var parts = kind === "forward" ? [["forward", stage.forward]]
        : [["recompute", stage.recompute], ["backward", stage.backward]];
      parts.forEach(function (part) {
        if (part[1] > 0) {
          spans.push({ kind: part[0], stage: pair[0], microBatch: pair[1], start: begin, end: begin + part[1] });
        }
        begin += part[1];
      });
      free[stage.ipu] = begin;
      return Math.max(end, begin);
    }, now);
  }
  function stageOf(pair) { return pair[0]; }
  function run(t, now) {
    var s;
    if (t % ticks.period === 0) { now += choice.fixed; }
    if (ticks.kind === "Sequential") {
      for (s = 0; stages.length > s; s += 1) {
        now = passes([[s, t]], "forward", exchange(receives([s]), now), {});
      }
      for (s = choice.training ? stages.length - 1 : -1; s >= 0; s -= 1) {
        now = exchange(receives([s]), passes([[s, t]], "backward", now, {}));
      }
      return now;
    }
    var forward = ticks.forward(t);
    var backward = ticks.backward(t);
    var ahead = receives(forward.map(stageOf).filter(function (own) { return stages.length - 1 > own; })
      .map(function (own) { return own + 1; }));
    if (ticks.kind === "Interleaved") {
      var free = {};
      var end = passes(forward, "forward", now, free);
      now = exchange(ahead, Math.max(end, passes(backward, "backward", now, free)));
    } else {
      now = exchange(ahead, passes(forward, "forward", now, {}));
      now = passes(backward, "backward", now, {});
    }
    return exchange(receives(backward.map(stageOf)), now);
  }
  var breakAt = Math.min(ticks.fullStart + told * ticks.period, ticks.fullEnd);
  var omitted = ticks.fullEnd - breakAt;
  var now = 0;
  for (var t = 0; breakAt > t; t += 1) { now = run(t, now); }
  var from = now;
  if (omitted > 0) { now += Math.floor(omitted / ticks.period) * choice.tick; }
  var to = now;
  for (t = breakAt + omitted; ticks.num > t; t += 1) { now = run(t, now); }
  return { spans: spans, omitted: omitted, from: omitted ? from : 0, to: omitted ? to : 0, end: now };
}

/* The choice that has the value that was changed, then as many of the others as there are, then the nearest batch. */
function pick(choices, wanted, changed) {
  var best = null;
  choices.forEach(function (choice, index) {
    choice.batches.forEach(function (batch, place) {
      var own = { ipus: choice.ipus, precision: choice.precision, micro: choice.micro, batch: batch.size };
      if (changed ? String(own[changed]) !== String(wanted[changed]) : false) { return; }
      var alike = ["ipus", "precision", "micro"].filter(function (name) {
        return String(own[name]) === String(wanted[name]);
      }).length;
      var far = Math.abs(Math.log(batch.size / Number(wanted.batch)));
      var rank = [alike, -far, batch.images];
      var at = 0;
      while (best ? (at === 3 ? false : rank[at] === best.rank[at]) : false) { at += 1; }
      if (best ? rank[at] > best.rank[at] : true) { best = { rank: rank, choice: index, batch: place }; }
    });
  });
  return best;
}

function milliseconds(seconds) {
  if (seconds >= 10) { return seconds.toPrecision(3) + " s"; }
  if (seconds >= 1) { return Math.round(1000 * seconds).toLocaleString("en-US") + " ms"; }
  return Number((1000 * seconds).toPrecision(3)) + " ms";
}

function explore(page) {
  var data = JSON.parse(page.getElementById("choices").textContent);
  var choices = data.choices;
  var names = ["ipus", "precision", "micro", "batch"];
  var selects = {};
  names.forEach(function (name) { selects[name] = page.getElementById("choose-" + name); });

  function make(tag, text, className) {
    var found = page.createElement(tag);
    if (text !== undefined) { found.textContent = text; }
    if (className) { found.className = className; }
    return found;
  }
  function draw(tag, attributes, title) {
    var found = page.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.keys(attributes).forEach(function (name) { found.setAttribute(name, attributes[name]); });
    if (title !== undefined) {
      var own = page.createElementNS("http://www.w3.org/2000/svg", tag === "text" ? "tspan" : "title");
      own.textContent = title;
      found.appendChild(own);
    }
    return found;
  }
  function fill(id, children) {
    var place = page.getElementById(id);
    while (place.firstChild) { place.removeChild(place.firstChild); }
    children.forEach(function (child) { place.appendChild(child); });
  }
  function values(name, of) {
    var found = [];
    of.forEach(function (choice) {
      var own = name === "batch" ? choice.batches.map(function (batch) { return batch.size; }) : [choice[name]];
      own.forEach(function (value) { if (found.indexOf(value) === -1) { found.push(value); } });
    });
    return found.sort(function (a, b) { return name === "precision" ? (a > b ? 1 : -1) : a - b; });
  }
  function offer(name, of, value) {
    fill("choose-" + name, values(name, of).map(function (each) {
      var option = make("option", String(each));
      option.value = String(each);
      return option;
    }));
    selects[name].value = String(value);
  }

  function show(found, wanted, changed) {
    var choice = choices[found.choice];
    var batch = choice.batches[found.batch];
    var own = { ipus: choice.ipus, precision: choice.precision, micro: choice.micro, batch: batch.size };
    names.forEach(function (name) { offer(name, name === "batch" ? [choice] : choices, own[name]); });
    var moved = names.filter(function (name) {
      return wanted ? (name !== changed ? String(own[name]) !== String(wanted[name]) : false) : false;
    });
    page.getElementById("explored-moved").textContent = moved.length === 0 ? ""
      : "No configuration of the front has all of these; changed with it: " + moved.map(function (name) {
        return data.names[name] + " " + own[name];
      }).join(", ") + ".";
    page.getElementById("explored-about").textContent = choice.about;
    var cards = [
      ["predicted throughput", Math.round(batch.images).toLocaleString("en-US") + " images/s", batch.bottleneck],
      ["predicted memory", choice.verdict + ": " + choice.fullest, "of the fullest IPU", choice.verdict],
      [data.whole, milliseconds(batch.seconds), batch.count + (batch.count === 1 ? " micro-batch" : " micro-batches")],
      ["predicted tick", milliseconds(choice.tick), "latency, forward: " + milliseconds(choice.latency)]
    ];
    fill("explored-cards", cards.map(function (card) {
      var box = make("div");
      box.appendChild(make("dt", card[0]));
      box.appendChild(make("dd", card[1], card[3] ? "value " + card[3].replace(/ /g, "-") : "value"));
      box.appendChild(make("dd", card[2], "muted"));
      return box;
    }));
    page.getElementById("explored-command").textContent = choice.command.replace(data.placeholder, batch.count);
    memory(choice);
    timeline(choice, batch.count);
    fill("explored-stages", choice.stages.map(function (stage, number) {
      var row = make("tr");
      row.appendChild(make("td", String(number), "n"));
      row.appendChild(make("td", String(stage.ipu), "n"));
      row.appendChild(make("td", stage.first + (stage.first === stage.last ? "" : " to " + stage.last), "name"));
      [stage.forward, stage.recompute, stage.backward, stage.receive].forEach(function (seconds) {
        row.appendChild(make("td", seconds > 0 ? milliseconds(seconds) : "\u2013", "n"));
      });
      return row;
    }));
  }

  function memory(choice) {
    var scale = 820 / Math.max(1, choice.fill);
    var height = 24 * choice.memory.length + 8;
    var parts = [];
    choice.memory.forEach(function (sizes, ipu) {
      var at = 76;
      parts.push(draw("text", { x: 0, y: 24 * ipu + 17, "class": "label" }, "IPU " + ipu));
      sizes.forEach(function (share, place) {
        var name = data.categories[place];
        parts.push(draw("rect", {
          x: at, y: 24 * ipu + 4, width: scale * share, height: 18, "class": "cat-" + name
        }, name.replace(/_/g, " ") + ": " + (100 * share).toFixed(1) + "% of an IPU, predicted"));
        at += scale * share;
      });
      parts.push(draw("text", { x: 906, y: 24 * ipu + 17, "class": "label strong" }, choice.fills[ipu]));
    });
    parts.push(draw("line", { x1: 76 + scale, x2: 76 + scale, y1: 0, y2: height, "class": "bound whole" }));
    var figure = draw("svg", {
      viewBox: "0 0 1000 " + height, "class": "figure", role: "img",
      "aria-label": "Predicted memory of each IPU of a replica"
    });
    parts.forEach(function (part) { figure.appendChild(part); });
    fill("explored-memory", [figure]);
  }

  function timeline(choice, count) {
    var told = timelineOf(choice, count, 3);
    var gap = told.omitted ? 64 : 0;
    var scale = (900 - gap) / (told.end - (told.to - told.from));
    function x(seconds) {
      return told.omitted ? (seconds >= told.to ? 76 + gap + scale * (seconds - told.to + told.from)
        : 76 + scale * seconds) : 76 + scale * seconds;
    }
    var row = 22;
    var height = row * choice.stages.length + 24;
    var figure = draw("svg", {
      viewBox: "0 0 1000 " + height, "class": "figure", role: "img", "aria-label": "Predicted pipeline timeline"
    });
    choice.stages.forEach(function (stage, number) {
      figure.appendChild(draw("text", { x: 0, y: row * number + 15, "class": "label" }, "stage " + number));
    });
    told.spans.forEach(function (span) {
      var across = Math.max(0.3, scale * (span.end - span.start));
      var all = span.stage === -1;
      figure.appendChild(draw("rect", {
        x: x(span.start), width: across, y: all ? 0 : row * span.stage + 2,
        height: all ? row * choice.stages.length : row - 4, "class": "pass-" + span.kind
      }, (all ? "transfer" : "stage " + span.stage + ", " + span.kind + ", micro-batch " + span.microBatch) + ": "
        + milliseconds(span.end - span.start) + ", predicted"));
    });
    if (told.omitted) {
      figure.appendChild(draw("text", {
        x: x(told.from) + gap / 2, y: row * choice.stages.length / 2 + 4, "class": "label middle"
      }, told.omitted + " more"));
    }
    figure.appendChild(draw("text", { x: 976, y: height - 6, "class": "label end" }, milliseconds(told.end)));
    fill("explored-timeline", [figure]);
  }

  function first() {
    var found = { choice: 0, batch: 0 };
    choices.forEach(function (choice, index) {
      choice.batches.forEach(function (batch, place) {
        if (choice.best ? batch.count === choice.count : false) { found = { choice: index, batch: place }; }
      });
    });
    return found;
  }

  names.forEach(function (name) {
    selects[name].addEventListener("change", function () {
      var wanted = {};
      names.forEach(function (each) { wanted[each] = selects[each].value; });
      show(pick(choices, wanted, name), wanted, name);
    });
  });
  page.getElementById("explore").hidden = false;
  show(first(), null, null);
}

if (typeof document !== "undefined") { explore(document); }
