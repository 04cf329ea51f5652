// The dialog that makes videos.

import {request} from "./api.js";
import {$, definitions, element} from "./dom.js";

const POLL_MS = 200;
const COLOR_OF = {target: "by2", drafter: "by0"};
let making = new AbortController();  // of the video that is shown
let videoUrl = "";  // of the downloaded file

const videos = (path, options) => request("v1/videos" + path, options);
const ms = (times) => `${(1e3 * Object.values(times).reduce((sum, part) => sum + part, 0)).toFixed(0)} ms`;

async function makeVideo() {
  cancelVideo();
  const {signal} = making = new AbortController();
  const body = {prompt: $("caption").value, router: $("router").value, blocks: $("blocks").valueAsNumber, output_format: $("format").value};
  for (const name of ["threshold", "seed"]) if ($(name).value && !$(name).disabled) body[name] = $(name).valueAsNumber;
  $("video-error").textContent = "";
  $("player").replaceChildren();
  try {
    let state = await (await videos("", {body})).json();
    const forget = () => videos("/" + state.id, {method: "DELETE"}).catch(() => {});
    if (signal.aborted) return forget();
    signal.addEventListener("abort", forget);
    $("video-stop").hidden = false;
    for (;;) {
      showVideo(state);
      if (state.status === "failed") throw new Error(state.error.message);
      if (state.status === "completed") break;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      state = await (await videos("/" + state.id, {signal})).json();
    }
    play(await (await videos(`/${state.id}/content`, {signal})).blob(), state);
  } catch (error) {
    if (signal.aborted) return;
    $("video-error").textContent = error.message;
    $("video-status").textContent = "";
  }
  $("video-stop").hidden = true;
}

// Cancel the video that is made, and forget the one that is shown.
function cancelVideo() {
  if (!$("video-stop").hidden) $("video-status").textContent = "canceled";
  making.abort();
  $("video-stop").hidden = true;
}

function showVideo({status, progress, note, seed, seconds, speculation}) {
  const {blocks, num_blocks: count, accepted_share: share, threshold, quality, seconds: times} = speculation;
  $("video-result").hidden = false;
  $("progress").value = progress;
  $("progress").hidden = status === "completed";
  $("video-status").textContent = status === "completed" ? note ?? "" : `${status.replace("_", " ")}: ${blocks.length} of ${count} blocks`;
  $("strip").replaceChildren(...Array.from({length: count}, (_, i) => blockEntry(i, blocks[i])));
  const rows = [
    ["exact", "no"], ["threshold", threshold === null ? "none" : +threshold.toFixed(4)],
    ["accepted drafts", share === null ? "no drafts" : (100 * share).toFixed(0) + "%"],
    ["measured quality", quality === null ? "not measured" : (100 * quality).toFixed(1) + "% of target-only"],
    ["time", ms(times)], ["duration", seconds + " s"], ["seed", seed],
  ];
  $("video-figures").replaceChildren(...definitions(rows));
}

function blockEntry(index, block) {
  if (!block) return element("li", {textContent: index});
  const {maker, drafted, score, failure, seconds} = block;
  const rejected = drafted && maker === "target" ? "rej. " : "";
  const scored = score === null ? (failure ? "no score" : "–") : rejected + score.toFixed(2);
  const title = [`made by the ${maker} in ${ms(seconds)}`, failure].filter(Boolean).join("; ");
  return element("li", {className: COLOR_OF[maker], title, textContent: [index, maker, scored].join("\n")});
}

function play(file, state) {
  URL.revokeObjectURL(videoUrl);
  videoUrl = URL.createObjectURL(file);
  const label = "video of " + state.prompt;
  const player = state.output_format === "gif"
    ? element("img", {src: videoUrl, alt: label})
    : element("video", {src: videoUrl, loop: true, muted: true, autoplay: true, controls: true, playsInline: true, ariaLabel: label});
  $("player").replaceChildren(player);
}

// Offer the dialog if the server has a model of videos.
export function offerVideos(model) {
  if (!model) return;
  const limits = model.video;
  $("video-model").textContent = model.id + ", not exact";
  $("blocks").max = $("blocks").value = limits.max_blocks;
  if (limits.score_range) [$("threshold").min, $("threshold").max] = limits.score_range;
  if (limits.threshold === null) $("threshold").value = .5;
  else $("threshold").placeholder = limits.threshold.toFixed(3);
  $("open-videos").hidden = false;
}

$("open-videos").onclick = () => $("videos").showModal();
$("video-form").onsubmit = (event) => {
  event.preventDefault();
  makeVideo();
};
$("video-stop").onclick = () => {
  cancelVideo();
  $("video-go").focus();
};
$("router").onchange = () => { $("threshold").disabled = $("router").value !== "gate"; };
