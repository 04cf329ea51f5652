// The dialog that makes videos.

import {request} from "./api.js";
import {$, definitions, element} from "./dom.js";

const POLL_MS = 200;
const COLOR_OF = {target: "by2", drafter: "by0"};
let video = null;  // the one that is shown
let videoUrl = "";  // of the downloaded file

const videos = (path, options) => request("v1/videos" + path, options);

async function makeVideo() {
  if (!$("video-form").reportValidity()) return;
  cancelVideo();
  const run = video = {};
  const gate = $("router").value === "gate";
  const body = {
    prompt: $("caption").value, router: $("router").value, blocks: Number($("blocks").value), output_format: $("format").value,
    ...(gate && $("threshold").value ? {threshold: Number($("threshold").value)} : {}),
    ...($("seed").value ? {seed: Number($("seed").value)} : {}),
  };
  $("video-error").textContent = "";
  try {
    let state = await (await videos("", {body})).json();
    run.id = state.id;
    if (video !== run) return forget(run);
    $("video-stop").hidden = false;
    $("player").replaceChildren();
    for (;;) {
      showVideo(state);
      if (state.status === "failed") throw new Error(state.error.message);
      if (state.status === "completed") break;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      if (video !== run) return;
      state = await (await videos("/" + run.id)).json();
      if (video !== run) return;
    }
    const file = await (await videos(`/${run.id}/content`)).blob();
    if (video === run) play(file, state);
  } catch (error) {
    if (video !== run) return;
    $("video-error").textContent = error.message;
    $("video-status").textContent = "";
  }
  if (video !== run) return;
  run.ended = true;
  $("video-stop").hidden = true;
}

function forget(run) {
  if (run.id) videos("/" + run.id, {method: "DELETE"}).catch(() => {});
}

// Cancel the video that is made, or forget the one that is shown.
function cancelVideo() {
  if (video && !video.ended) $("video-status").textContent = "canceled";
  if (video) forget(video);
  video = null;
  $("video-stop").hidden = true;
}

function showVideo({status, progress, note, seed, seconds, speculation}) {
  const {blocks, num_blocks: count, accepted_share: share, threshold, quality, seconds: times} = speculation;
  $("video-result").hidden = false;
  $("progress").value = progress;
  $("progress").hidden = status === "completed";
  $("video-status").textContent = status === "completed" ? note ?? "" : `${status.replace("_", " ")}: ${blocks.length} of ${count} blocks`;
  $("strip").replaceChildren(...Array.from({length: count}, (_, i) => blockEntry(i, blocks[i])));
  const took = Object.values(times).reduce((sum, part) => sum + part, 0);
  const rows = [
    ["exact", "no"], ["threshold", threshold === null ? "none" : String(+threshold.toFixed(4))],
    ["accepted drafts", share === null ? "no drafts" : (100 * share).toFixed(0) + "%"],
    ["measured quality", quality === null ? "not measured" : (100 * quality).toFixed(1) + "% of target-only"],
    ["time", (1e3 * took).toFixed(0) + " ms"], ["duration", seconds + " s"], ["seed", String(seed)],
  ];
  $("video-figures").replaceChildren(...definitions(rows));
}

function blockEntry(index, block) {
  const entry = element("li");
  entry.append(element("div", {textContent: index}));
  if (!block) return entry;
  const rejected = block.drafted && block.maker === "target";
  const score = block.score === null ? (block.failure ? "no score" : "–") : (rejected ? "rej. " : "") + block.score.toFixed(2);
  const took = Object.values(block.seconds).reduce((sum, part) => sum + part, 0);
  entry.className = COLOR_OF[block.maker];
  entry.title = [`made by the ${block.maker} in ${(1e3 * took).toFixed(0)} ms`, block.failure].filter(Boolean).join("; ");
  entry.append(element("div", {textContent: block.maker}), element("div", {textContent: score}));
  return entry;
}

function play(file, state) {
  URL.revokeObjectURL(videoUrl);
  videoUrl = URL.createObjectURL(file);
  const label = "video of " + state.prompt;
  if (state.output_format === "gif") {
    $("player").replaceChildren(element("img", {src: videoUrl, alt: label}));
    return;
  }
  const player = element("video", {
    src: videoUrl, loop: true, muted: true, autoplay: true, controls: true, playsInline: true, ariaLabel: label,
  });
  $("player").replaceChildren(player);
  const count = state.speculation.num_blocks;
  const mark = () => {  // the block that is shown
    if (!player.isConnected) return;
    const now = Math.min(count - 1, Math.floor(player.currentTime / player.duration * count));
    [...$("strip").children].forEach((entry, i) => entry.classList.toggle("now", i === now));
    requestAnimationFrame(mark);
  };
  requestAnimationFrame(mark);
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

$("open-videos").addEventListener("click", () => $("videos").showModal());
$("video-form").addEventListener("submit", (event) => {
  event.preventDefault();
  makeVideo();
});
$("video-stop").addEventListener("click", () => { cancelVideo(); $("video-go").focus(); });
$("router").addEventListener("change", () => { $("threshold").disabled = $("router").value !== "gate"; });
