// A picture from the camera, which is asked for only when somebody wants one.

export async function openCamera(dialog, onPicture) {
  if (!navigator.mediaDevices?.getUserMedia)
    throw new Error("The browser gives no camera here. It does so on localhost, or over an encrypted connection.");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
  } catch (error) {
    throw new Error(error.name === "NotFoundError" ? "No camera was found." : "The camera was not allowed, or is in use.");
  }
  const video = dialog.querySelector("video");
  video.srcObject = stream;
  const stop = () => {
    stream.getTracks().forEach((track) => track.stop());
    video.srcObject = null;
  };
  dialog.addEventListener("close", stop, { once: true });
  const take = dialog.querySelector(".take");
  take.disabled = true; // until there is a picture to take
  take.onclick = async () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    canvas.getContext("2d").drawImage(video, 0, 0);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    dialog.close();
    onPicture(new File([blob], "Camera", { type: "image/png" }));
  };
  dialog.showModal();
  await video.play();
  take.disabled = false;
}
